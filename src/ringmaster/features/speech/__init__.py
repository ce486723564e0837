"""Speech with its text: the kind of data `speech-text`, its recordings, and what models of it need."""
