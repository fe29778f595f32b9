"""The command line: one module of arguments per command, free of heavy imports."""
