"""Fine-tuning of the pruned model: trainer, losses of rounds, augmentation."""
