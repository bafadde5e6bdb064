"""Notifications: check the entries of ``notify``, compose messages, and send them in a process of their own."""
