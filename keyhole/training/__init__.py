"""The only training loop, and what it needs: engine, optimizers, schedule, precision, parallel processes."""
