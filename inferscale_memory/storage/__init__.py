"""What every file of a memory needs: transactions, and deleted text that really leaves the disk."""
