"""Prompts built of the modules of a schema: `kvrt prefill --schema` and `kvrt ask --schema`."""
