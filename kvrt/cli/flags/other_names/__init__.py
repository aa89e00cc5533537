"""Names that are no flags here: of other programs, of former versions, and mistyped ones."""
