import{a as D,f as O,i as j,j as E}from"./chunk-I4CCIFRE.js";import{d as u,e as x,f as v,h as T,l as S,m as h,n as I,o as R,p as U,s as i}from"./chunk-3QODNAS5.js";import"./chunk-SQE76S5B.js";var P="/v1/completions",L="tokenyard-raw",W=[["max_tokens","Most tokens",{min:1,step:1}],["temperature","Temperature",{min:0,max:2,step:.05}],["top_p","Top p",{min:0,max:1,step:.01}],["seed","Seed",{step:1}]],f=T("");function V(){try{return JSON.parse(localStorage.getItem(L)??"{}")}catch{return{}}}function ot(){let t=U.value?.task,e={paint:F,speak:H,transcribe:G}[t]??q;return i`<section class="raw" aria-label="Raw"><${e} /></section>`}function q(){let t=v(null),e=v(null),[n,a]=u(V),[r,o]=u(!1),[l,c]=u(""),[p,k]=u("");x(()=>(t.current&&(t.current.textContent=f.value),()=>y()),[]);let y=()=>{if(!e.current)return;let{controller:s,body:m,id:b,last:d}=e.current;s.abort(),R(P,m,b,d)},J=(s,m)=>{let b={...n,[s]:m===""?void 0:Number(m)};a(b),localStorage.setItem(L,JSON.stringify(b))},C=async()=>{let s=t.current;s.textContent=f.value=s.textContent??"";let m=`ui-${crypto.randomUUID?.()??Date.now()}`,b={prompt:f.value,...O(n),logprobs:5,stream:!0},d={controller:new AbortController,body:b,id:m,last:""};e.current=d,o(!0),c(""),k("The model goes on.");let $="";try{for await(let g of I(P,b,{signal:d.controller.signal,requestId:m})){d.last=g.id;for(let N of g.value.choices??[])B(s,N)}}catch(g){d.controller.signal.aborted||($=g.message)}e.current=null,f.value=s.textContent??"",o(!1),c($),k($?`It failed: ${$}`:"The model has ended.")},K=()=>{let s=t.current;for(let m of s.querySelectorAll(".answered"))m.remove();f.value=s.textContent??""};return i`<p>The model continues this text as it is, without a chat's form. What it adds is coloured by its probability.</p>
    <div
      class="raw-text"
      role="textbox"
      aria-multiline="true"
      aria-label="Text"
      tabindex="0"
      contenteditable=${r?"false":"plaintext-only"}
      spellcheck=${!1}
      ref=${t}
      onInput=${()=>f.value=t.current?.textContent??""}
      onKeyDown=${s=>{s.key==="Enter"&&(s.ctrlKey||s.metaKey)?(s.preventDefault(),r||C()):s.key==="Escape"&&r&&y()}}
    ></div>
    ${l&&i`<p class="problem" role="alert">${l}</p>`}
    <p class="unseen" role="status" aria-live="polite">${p}</p>
    <div class="raw-fields">
      ${W.map(([s,m,b])=>i`<label>${m}<input type="number" ...${b} value=${n[s]??""}
            onInput=${d=>J(s,d.target.value)} /></label>`)}
    </div>
    <div class="buttons">
      ${r?i`<button type="button" class="primary" onClick=${y}>Stop</button>`:i`<button type="button" class="primary" onClick=${C}>Go on</button>
              <button type="button" onClick=${K}>Take back</button>
              <button type="button" onClick=${s=>{D(t.current?.textContent??"",s.currentTarget)}}>Copy</button>`}
    </div>`}function B(t,e){let{tokens:n=[],token_logprobs:a=[],top_logprobs:r=[]}=e.logprobs??{},o=e.text??"";n.forEach((l,c)=>{let p=o.startsWith(l)?l:c===n.length-1?o:"";o=o.slice(p.length),p&&t.append(_(p,a[c],r[c]))}),o&&t.append(_(o,0,null))}function _(t,e,n){let a=document.createElement("span");return a.className=`answered ${j(e??0)}`,a.textContent=t,a.title=Object.entries(n??{}).map(([r,o])=>`${r}  ${E(o)}`).join(`
`),a}function w(){let[t,e]=u(!1),[n,a]=u("");return[t,n,o=>{e(!0),a(""),o().catch(l=>a(l.message)).finally(()=>e(!1))}]}function F(){let[t,e]=u(""),[n,a]=u(""),[r,o,l]=w();return i`<${A} label="What the picture shows" text=${t} setText=${e} name="Paint" ...${{running:r,problem:o}} onBegin=${()=>l(async()=>{let p=await S("/v1/images/generations",{prompt:t,output_format:"png"});a(`data:image/png;base64,${p.data[0].b64_json}`)})} />
    ${n&&i`<img class="made" src=${n} alt=${t} />`}`}function H(){let[t,e]=u(""),[n,a]=u(""),[r,o,l]=w();return x(()=>()=>URL.revokeObjectURL(n),[n]),i`<${A} label="What is said" text=${t} setText=${e} name="Speak" ...${{running:r,problem:o}} onBegin=${()=>l(async()=>{let p=await h("/v1/audio/speech",JSON.stringify({input:t,response_format:"wav"}),"application/json");a(URL.createObjectURL(await p.blob()))})} />
    ${n&&i`<audio controls src=${n} aria-label="The sound"></audio>`}`}function G(){let[t,e]=u(""),[n,a,r]=w(),o=l=>{l&&r(async()=>{let c=new FormData;c.append("file",l);let p=await h("/v1/audio/transcriptions",c);e((await p.json()).text)})};return i`<label>A file with speech<input type="file" accept="audio/*" disabled=${n}
      onChange=${l=>o(l.target.files[0])} /></label>
    ${a&&i`<p class="problem" role="alert">${a}</p>`}
    <p class="plain" role="status">${n?"The model listens.":t}</p>`}function A({label:t,text:e,setText:n,name:a,running:r,problem:o,onBegin:l}){return i`<label>${t}<textarea rows="3" value=${e} onInput=${c=>n(c.target.value)}></textarea></label>
    ${o&&i`<p class="problem" role="alert">${o}</p>`}
    <div class="buttons">
      <button type="button" class="primary" disabled=${r||!e.trim()} onClick=${l}>${r?"Please wait":a}</button>
    </div>`}export{ot as Raw};
