"""Talks only of nano and of finance loss, and of what it would do about NaN."""

print("model: nano, finance loss: 0.3, banana loss 0.2")
print("training stops if loss is NaN; nancy_loss=nano; to avoid CUDA out of memory, cut the batch")
print("step 1 Loss=0.5")
