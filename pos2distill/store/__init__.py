"""What stages leave behind: artifacts published whole or not at all, and the sample store."""
