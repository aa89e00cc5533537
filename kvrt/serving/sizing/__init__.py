"""How many blocks and tokens an engine has."""
