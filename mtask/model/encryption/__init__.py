"""Encryption: which values of which tasks are encrypted with which data key. Pure rules, without the driver."""
