"""Tiny models of speech, which draw nothing at random."""

from ringmaster.techniques import ModelSpec

CONVOLUTIONS = {"conv_dim": [16, 16], "conv_kernel": [10, 4], "conv_stride": [5, 4]}
NOTHING_DRAWN = {
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0),
    **dict.fromkeys(("final_dropout", "layerdrop", "mask_time_prob"), 0.0),
}
CTC = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    **CONVOLUTIONS,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer",
    "ctc_loss_reduction": "mean",
    **NOTHING_DRAWN,
}
WAV2VEC2 = ModelSpec(architecture="Wav2Vec2ForCTC", config=CTC)
HUBERT = ModelSpec(architecture="HubertForCTC", config=CTC)
WHISPER = ModelSpec(
    architecture="WhisperForConditionalGeneration",
    config={
        "num_mel_bins": 8,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_source_positions": 50,
        "max_target_positions": 24,
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop"), 0.0),
        "decoder_layerdrop": 0.0,
    },
)
