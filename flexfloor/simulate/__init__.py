"""What a schedule would cost: traces of lengths, the engine's iterations, whole passes under any clock."""
