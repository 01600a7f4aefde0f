/* A page that was opened as a file may start no worker, so the site's search would find nothing there. For such pages
   this is a stand-in: the script of the worker runs in a hidden frame, and messages are events of its window. */
"use strict";
(() => {
  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html><title>search</title>";
      const shown = new Promise((resolve) => this.frame.addEventListener("load", resolve, { once: true }));
      document.body.append(this.frame);
      this.ready = shown.then(() => this.#begin(new URL(url, document.baseURI).href));
    }

    async #begin(url) {
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
      inside.importScripts = async (...urls) => {
        for (const each of urls) await loaded(inside.document, each);
      };
      await loaded(inside.document, url);
      return inside;
    }

    postMessage(data) {
      this.ready.then(
        (inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data: structuredClone(data) })),
        () => this.dispatchEvent(new Event("error")),
      );
    }

    terminate() {
      this.frame.remove();
    }
  }

  function loaded(page, url) {
    return new Promise((resolve, reject) => {
      const script = page.createElement("script");
      script.src = url;
      script.addEventListener("load", resolve);
      script.addEventListener("error", reject);
      page.body.append(script);
    });
  }

  if (location.protocol === "file:") window.Worker = FrameWorker;
})();
