// The last minute: what was told, and the memory at any moment of it.

const MINUTE_S = 60;

class Recorder {
  constructor() {
    this.base = null; // the memory before the first event
    this.events = [];
    this.samples = []; // figures over time, for the charts
  }

  add(event, memory) {
    if (!this.base || memory.time < this.samples.at(-1).time) { // or another engine's clock
      this.base = memory.clone();
      this.events = [];
      this.samples = [];
    } else {
      this.events.push(event);
    }
    this.samples.push({ time: memory.time, figures: memory.figures, ...memory.shares });
    const begin = memory.time - MINUTE_S;
    while (this.events.length && this.events[0].data.time < begin) this.base.apply(this.events.shift());
    while (this.samples.length > 1 && this.samples[1].time < begin - 2) this.samples.shift();
  }
}

// The memory at any moment of a recorded minute.
class Replay {
  constructor(recorder, now) {
    this.base = recorder.base.clone();
    this.events = recorder.events.slice();
    this.samples = recorder.samples.slice();
    this.end = now;
    this.begin = Math.max(this.base.time, now - MINUTE_S);
    this.seek(this.begin);
  }

  // Returns the blocks that look different; null: all.
  seek(time) {
    let touched = [];
    if (!this.memory || time < this.time) {
      this.memory = this.base.clone();
      this.next = 0;
      touched = null;
    }
    this.time = time;
    while (this.next < this.events.length && this.events[this.next].data.time <= time) {
      const more = this.memory.apply(this.events[this.next++]);
      if (more === null) touched = null;
      else if (touched) for (const block of more) touched.push(block);
    }
    return touched;
  }
}
