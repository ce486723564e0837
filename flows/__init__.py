"""What a person or a schedule starts: one readable flow a file, and the command line."""
