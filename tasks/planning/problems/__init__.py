"""Planning problems: the data classes, their JSON form, their validation, and random families of problems."""
