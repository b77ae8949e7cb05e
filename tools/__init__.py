"""What the package carries ready-made, and how it was made."""
