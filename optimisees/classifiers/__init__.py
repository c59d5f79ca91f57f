"""Classifiers of images: multilayer perceptron, ConvNet and ResNet."""
