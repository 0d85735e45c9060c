"""The timeline that kernels write when they are traced: kept on the device, read, aligned over ranks, drawn."""
