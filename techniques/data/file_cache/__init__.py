"""What was prepared from single files, kept so that data with new files or new lines reads only these."""
