"""The `kvtide` command: a module per verb, tables and reports. `main` is where it starts."""
