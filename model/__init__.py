"""What turns tokens into logits, and logits into a token."""
