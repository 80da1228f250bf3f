"""The work behind the rules: one verb a file, each reads declared inputs and writes its output whole or not at all."""
