"""The engines that are compared, ours among them, each driven in a process of its own."""
