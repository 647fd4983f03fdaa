"""Text in and out of the engine: prompts to token ids, token ids to text as it comes, stop strings."""
