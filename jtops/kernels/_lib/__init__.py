"""What every op shares."""
