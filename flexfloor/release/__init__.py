"""What becomes of workers that have left the EP group during a step."""
