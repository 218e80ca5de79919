"""Next-token prediction with a Llama-shaped decoder."""
