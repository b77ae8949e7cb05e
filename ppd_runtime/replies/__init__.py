"""What a model's reply in a conversation consists of: thinking, text and calls of tools, in each family's own form."""
