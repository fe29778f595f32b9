"""What a task can train beside its own loss, one file each; `base` says what an objective is."""
