"""The calibrator: measures this machine once, keeps what it found, and gives every recipe its own cap."""
