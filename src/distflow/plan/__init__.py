"""What will run where, with which command and environment: decided from values alone, printed or executed unchanged."""
