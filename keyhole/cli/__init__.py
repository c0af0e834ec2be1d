"""The command line: parse, call, print. One command a file; what is slow to import is imported inside the command."""
