"""What runs in the caller's process: plans made ready, requests made and run, receipts of what came back."""
