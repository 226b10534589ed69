"""Answers before anything is built: will this recipe run here, and if not, what to change. See :mod:`.stages`."""
