"""Where fused operators go: normalise the post-grad graph, find sites, choose, rewrite. One finder file an operator."""
