"""One rollout step: send every response to a rank, record it, and say what the step cost."""
