"""Planning time and plans for machines that are not here."""
