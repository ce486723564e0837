"""Speech with its text: the kind of data `speech-text`, its recordings, and what models of it need."""

DATA_SOURCES = {"speech-text": "ringmaster.features.speech.data:SpeechText"}
LOSSES = {"ctc": "ringmaster.features.speech.ctc:Ctc"}
MODEL_LOSSES = {"ForCTC": "ctc"}
METRICS = {
    "word_error_rate": "ringmaster.features.speech.error_rates:WordErrorRate",
    "character_error_rate": "ringmaster.features.speech.error_rates:CharacterErrorRate",
}
