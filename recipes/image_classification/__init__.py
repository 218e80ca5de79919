"""Image classification with a ResNet or a vision transformer."""
