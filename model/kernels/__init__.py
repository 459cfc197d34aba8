"""Fused CPU kernels. Each token's numbers depend on its own data alone, in an order that the source fixes."""
