"""A package, so that no installed package of the name `tests` comes before it."""
