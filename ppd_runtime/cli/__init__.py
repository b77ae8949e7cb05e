"""The `ppd` command: one file a command, no logic. Heavy imports wait until a command runs."""
