"""Speech with its text: the kind of data `speech-text`, its recordings, and what models of it need."""

DATA_SOURCES = {"speech-text": "ringmaster.features.speech.data:SpeechText"}
