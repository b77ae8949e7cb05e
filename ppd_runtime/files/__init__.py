"""Files that appear whole or not at all: results, images, and the user's cache folder."""
