"""What joins mtask and other packages. Nothing of mtask imports it, and who does not use it pays nothing."""
