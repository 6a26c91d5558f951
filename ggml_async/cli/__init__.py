"""The command line: parses and prints, one module per command."""
