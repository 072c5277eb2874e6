"""The command line: one thin file a verb, holding arguments, calls and printing."""
