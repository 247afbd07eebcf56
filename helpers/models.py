"""The two models, and how a model's forward pass is cut into segments for checkpointing."""
