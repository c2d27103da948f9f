"""What an app declares: handlers and middleware."""
