"""Training: pure loss code, the trainer's processes and the driver's client for them."""
