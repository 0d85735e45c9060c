"""Makes it happen: agreement between ranks, JIT, launch, symmetric memory, topology probe."""
