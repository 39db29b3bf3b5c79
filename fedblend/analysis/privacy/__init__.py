"""What can be proved, and what can be measured, of what leaves a client."""
