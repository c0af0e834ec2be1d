"""What one does with a run that is trained: evaluate it, sample from it, export it."""
